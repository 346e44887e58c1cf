"""HTTP: routes that only translate, content negotiation, problem+json, metrics, the documents."""
