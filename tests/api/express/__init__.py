"""What express answers, held against the ordinary way."""
