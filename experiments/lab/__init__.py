"""The network lab: an emulated wide-area network under unmodified programs."""
