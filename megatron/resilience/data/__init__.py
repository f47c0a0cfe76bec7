"""What the ranks train on: corpora turned into datasets, and datasets turned into samples."""
