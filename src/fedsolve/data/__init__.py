"""Where rows come from: tables, datasets, backbones, the feature store; and how they are partitioned."""
