"""What the server speaks: one file a family of clients."""
