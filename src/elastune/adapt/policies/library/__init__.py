"""The policies that come with elastune, one file each."""
