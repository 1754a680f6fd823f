"""Pages and pictures made from records."""
