"""Where an environment's software comes from. One module per source; each turns an Environment into a Rootfs."""
