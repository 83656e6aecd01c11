"""Where K and V live: pages owned by requests (`pages`), and the tensors behind the pages (`cache`)."""
