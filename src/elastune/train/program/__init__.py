"""The user's file: imported, digested."""
