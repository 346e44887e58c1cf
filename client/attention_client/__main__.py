"""``python -m attention_client``: the command ``attention``."""

from attention_client.cli import main

if __name__ == "__main__":
    main()
