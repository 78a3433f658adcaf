"""What may change while training runs, and when: users write these."""
