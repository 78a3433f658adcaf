"""What is asked of a running study from outside: the requests, and what the study decides on them."""
