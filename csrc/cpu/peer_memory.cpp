// The CPU backend of peer memory, between processes or threads of one host: see ops/peer_memory.h.
// The calling thread copies and waits.
#include "ops/peer_memory.h"

#include <atomic>

#include "cpu/rank_wait.h"
#include "ops/copy.h"

namespace te::cpu {
namespace {

std::atomic_ref<uint32_t> flag(void* address) {
  return std::atomic_ref<uint32_t>(*static_cast<uint32_t*>(address));
}

void set(void* address) { flag(address).store(1, std::memory_order_release); }
void clear(void* address) { flag(address).store(0, std::memory_order_relaxed); }

void wait_for(void* address, const AwaitedRank& rank, const char* op) {
  wait_for_rank(rank, op, [&] { return flag(address).load(std::memory_order_acquire) == 1; });
}

}  // namespace

void peer_send(const Rows& rows, const PeerSlots& slots, int64_t pitch) {
  for (const PeerSlot& slot : slots) {
    wait_for(slot.free, slot.other, "peer_send");
    clear(slot.free);
    copy(rows, placed(rows, slot.data, pitch));
    set(slot.arrived);
  }
}

void peer_receive(const PeerSlots& slots) {
  for (const PeerSlot& slot : slots) wait_for(slot.arrived, slot.other, "peer_receive");
}

void peer_copy(const Rows& out, const PeerSlot& slot) { copy(without_gaps(out, slot.data), out); }

void peer_release(const PeerSlots& slots) {
  for (const PeerSlot& slot : slots) {
    clear(slot.arrived);
    set(slot.free);
  }
}

}  // namespace te::cpu
