"""Short measurements of this rank's device and links, when the coordinator asks for them."""
