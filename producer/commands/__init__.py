"""The commands of `producer`, a module for each kind; `producer.cli` puts them together."""
