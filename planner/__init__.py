"""Which configuration serves an intent best, and why. Pure: values in, values out."""
