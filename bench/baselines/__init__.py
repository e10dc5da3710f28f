"""Our own code for the algorithms that the benches compare with."""
