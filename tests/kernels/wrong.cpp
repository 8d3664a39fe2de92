#error "no kernel"
