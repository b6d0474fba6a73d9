"""Where a context is when it is not in the GPU cache: KV connectors, and a tier of our own."""
