"""Device profiles: resolved for a build, measured on this machine, imported from fio."""
