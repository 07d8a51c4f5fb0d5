"""Methods that are from memory, in part or whole; each says what."""
