"""What would happen if these devices failed: a layout before and after, without a job."""
