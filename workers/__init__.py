"""What happens when the bell rings."""
