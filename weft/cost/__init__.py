"""What things cost: communication, and the cheapest way from one layout to another."""
