"""The right of a coordinator to decide: nobody else could, it holds a lease, or a majority confirms it. PURE."""
