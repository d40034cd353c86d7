"""Which rank trains which sample when: one order per epoch, one position in it, dealt to any number of ranks.

position.py     the epoch's order, how much of it is trained (a snapshot keeps that), and each rank's share of a batch
shards.py       the same for data that can only be read in sequence
loader.py       DataLoader: all of it around torch's loader; random numbers of a sample's augmentation
sampler.py      DistributedSampler: for scripts that keep torch's loader
"""
