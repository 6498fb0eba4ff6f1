"""What travels: frames, the headers of messages, and how payloads are laid out."""
