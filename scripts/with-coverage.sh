#!/bin/sh
# The compiler with LLVM's coverage, for the crates of the workspace: see `cargo xtask fuzz --coverage`.
exec "$@" -C instrument-coverage
