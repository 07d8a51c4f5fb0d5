"""How claims are read, measured, checked and shown; the program is `claims`."""
