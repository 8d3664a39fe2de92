"""How a rank runs its program: communicators, backends, launcher, watchdog. Never imports the compiler."""
