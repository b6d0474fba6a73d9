"""What runs in the engine core: the scheduler mixin, its statistics, and the utility call."""
