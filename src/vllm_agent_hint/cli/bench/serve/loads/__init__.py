"""The loads. Each is a function of scale and seed, and yields one script per repetition."""
