"""Execution of rank programs. Communicators, backends, launcher, watchdog; never imports the compiler."""
