"""What a restart costs, and what being ready for one costs."""
