"""The commands by subject, and the table of those that send one request."""
