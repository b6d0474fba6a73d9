"""Between the client and the engine: carrying hints, answering management requests, metrics."""
