"""Who may do what: keys, tenants, rates, operators."""
