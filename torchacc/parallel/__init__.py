"""Who holds what: the mesh, the plan of a model, and the rule of sharding. Plain data: no device, no process group."""
