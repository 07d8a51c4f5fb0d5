"""What is exchanged and when: fragments, schedules, merges, methods. No device."""
