"""Images as inputs: decoded, cut into patches by an encoder, and beside text in a prompt."""
