"""By what right a coordinator decides: nobody else could, it holds a lease, or a majority confirms it. PURE."""
