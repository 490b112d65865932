"""What a pool's slots hold, written where it outlives the process."""
