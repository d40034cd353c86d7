"""The doctor: gathers facts about nodes, makes findings of them, explains their codes and renders them."""
