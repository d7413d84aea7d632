#!/bin/sh
# May be run.
