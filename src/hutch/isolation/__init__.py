"""How a Spec is isolated. `jail` is the backend; the other modules each own one layer of it."""
