"""Real training engines as judges: tiny runs whose live state is known exactly."""
