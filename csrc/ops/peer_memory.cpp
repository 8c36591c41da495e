#include "ops/peer_memory.h"

#include <algorithm>
#include <vector>

#include "ops/check.h"
#include "ops/dispatch.h"
#include "ops/sum_parts.h"

namespace te {
namespace {

// The number of ranks that send to a rank.
int senders_of(int ranks, bool ring) { return ring ? std::min(2, ranks - 1) : ranks - 1; }

int index(PeerField field) { return static_cast<int>(field); }

// Reads the tensor that describes a group (see PeerField), and finds the addresses of a slot.
class Group {
 public:
  Group(const TensorView& group, int slot, const char* op)
      : fields_(group.ptr<int64_t>()),
        ranks_(static_cast<int>(group.numel() - index(PeerField::Addresses))),
        slot_(slot),
        op_(op) {
    check::vector(group, group.numel(), DType::Int64, op, "group");
    require(group.device.type == DeviceType::CPU && ranks_ > 1, Kind::Value, op,
            "expected a group of two or more ranks on the CPU, got ", group);
    require(slot >= 0 && slot < slots(), Kind::Value, op, "expected a slot of ", slots(),
            ", got slot ", slot);
  }
  Group(const PeerTransfer& transfer, const char* op) : Group(transfer.group, transfer.slot, op) {}

  int ranks() const { return ranks_; }
  bool ring() const { return at(PeerField::Ring) != 0; }
  int slots() const { return peer_slots(ranks_, ring()); }
  int64_t room() const { return at(PeerField::Room); }
  char* own_memory() const { return memory_of(own()); }
  char* memory_of(int rank) const {
    return reinterpret_cast<char*>(fields_[index(PeerField::Addresses) + rank]);
  }
  int64_t& last_stream() const { return fields_[index(PeerField::LastStream)]; }
  int64_t sent() const { return fields_[index(PeerField::Sent) + slot_]; }
  // The slots to which this rank sends, and from which it receives, for one other rank or for all.
  PeerSlots to(int rank) const {
    return slots_of(rank, 1, [&](int other) { return between(own(), other); });
  }
  PeerSlots from(int rank) const {
    return slots_of(rank, -1, [&](int other) { return between(other, own()); });
  }
  cuda::PeerEvents events() const {
    return {.send_stream = at(PeerField::SendStream),
            .computed = at(PeerField::Computed),
            .sent = sent()};
  }

 private:
  int64_t at(PeerField field) const { return fields_[index(field)]; }
  int own() const { return static_cast<int>(at(PeerField::Rank)); }

  // With kAllOthers, the nearest rank is first. In memory of a receiver, the slots of all senders
  // are adjacent in this order.
  template <class SlotOf>
  PeerSlots slots_of(int rank, int step, const SlotOf& slot_of) const {
    if (rank != kAllOthers) {
      require(rank >= 0 && rank < ranks_ && rank != own(), Kind::Value, op_,
              "expected another rank of ", ranks_, ", got rank ", rank);
      return {slot_of(rank)};
    }
    require(!ring(), Kind::Value, op_, "expected memory for all ranks, got that of a ring");
    PeerSlots found;
    for (int place = 1; place < ranks_; ++place)
      found.push_back(slot_of((own() + ranks_ + step * place) % ranks_));
    return found;
  }
  PeerSlot between(int sender, int receiver) const {
    const int distance = (receiver - sender + ranks_) % ranks_;
    require(!ring() || distance == 1 || distance == ranks_ - 1, Kind::Value, op_,
            "expected the next rank of a ring or the previous one, got ", receiver, " from ",
            sender);
    const int number = (ring() ? std::min(distance, 2) : distance) - 1;
    return {.data = memory_of(receiver) + room() * (senders_of(ranks_, ring()) * slot_ + number),
            .free = flag(sender, slot_ * ranks_ + receiver),
            .arrived = flag(receiver, (slots() + slot_) * ranks_ + sender),
            .other = {.rank = sender == own() ? receiver : sender,
                      .timeout = at(PeerField::Timeout),
                      .lock_file = at(PeerField::LockFile)}};
  }
  void* flag(int owner, int number) const {
    const int64_t bytes = slots() * senders_of(ranks_, ring()) * room();
    return memory_of(owner) + bytes + kPeerFlagBytes * number;
  }

  int64_t* fields_;
  int ranks_, slot_;
  const char* op_;
};

void send(const TensorView& x, const Rows& rows, const PeerSlots& slots, int64_t pitch,
          const Group& group, Stream stream) {
  on_device(
      x, [&] { cpu::peer_send(rows, slots, pitch); },
      [&] { cuda::peer_send(rows, slots, pitch, group.events(), x.device, stream); });
}

}  // namespace

int peer_slots(int ranks, bool ring) { return ring && ranks > 2 ? kRingSlots : kPeerSlots; }

int64_t peer_memory_bytes(int ranks, int64_t room, bool ring) {
  return peer_slots(ranks, ring) *
         (senders_of(ranks, ring) * room + int64_t{2} * ranks * kPeerFlagBytes);
}

int64_t peer_slot_offset(const PeerTransfer& from) {
  const Group group(from, "peer_memory");
  return group.from(from.rank).front().data - group.own_memory();
}

void peer_send(const TensorView& x, const PeerTransfer& to, Stream stream) {
  const Group group(to, "peer_send");
  check::same_device(x, to.memory, "peer_send", "x");
  require(x.bytes() <= group.room(), Kind::Value, "peer_send", "expected at most ", group.room(),
          " bytes, got ", x);
  const Rows rows = rows_of(x, "peer_send", "x");
  const PeerSlots slots = group.to(to.rank);
  send(x, rows, slots, rows.bytes, group, stream);
}

void peer_spread(const TensorView& x, const TensorView& memory, const TensorView& group, int slot,
                 Stream stream) {
  constexpr const char* kOp = "peer_spread";
  const Group of(group, slot, kOp);
  check::same_device(x, memory, kOp, "x");
  const Rows rows = rows_of(x, kOp, "x");
  PeerSlots slots = of.to(kAllOthers);
  const int64_t bytes = of.room() * (of.ranks() - 1);
  const int64_t place = rows.data - of.from(kAllOthers).front().data;
  const int64_t reach = rows.pitch * (rows.count - 1) + rows.bytes;
  require(place >= 0 && place + reach <= bytes, Kind::Value, kOp, "expected x in the ", bytes,
          " bytes of the slot, got ", reach, " bytes at ", place);
  for (PeerSlot& to : slots) to.data = of.memory_of(to.other.rank) + (rows.data - of.own_memory());
  send(x, rows, slots, rows.pitch, of, stream);
}

void peer_receive(const PeerTransfer& from, Stream stream) {
  const Group group(from, "peer_receive");
  const PeerSlots slots = group.from(from.rank);
  on_device(
      from.memory, [&] { cpu::peer_receive(slots); },
      [&] { cuda::peer_receive(slots, group.last_stream(), from.memory.device, stream); });
}

void peer_copy(const TensorView& out, const PeerTransfer& from, Stream stream) {
  const Group group(from, "peer_copy");
  check::same_device(out, from.memory, "peer_copy", "out");
  check::contiguous(out, "peer_copy", "out");
  require(out.bytes() <= group.room(), Kind::Value, "peer_copy", "expected at most ", group.room(),
          " bytes, got ", out);
  const Rows rows = rows_of(out, "peer_copy", "out");
  const PeerSlot slot = group.from(from.rank).front();
  on_device(
      out, [&] { cpu::peer_copy(rows, slot); },
      [&] { cuda::peer_copy(rows, slot, group.events(), out.device, stream); });
}

void peer_release(const PeerTransfer& from, Stream stream) {
  const PeerSlots slots = Group(from, "peer_release").from(from.rank);
  on_device(
      from.memory, [&] { cpu::peer_release(slots); },
      [&] { cuda::peer_release(slots, from.memory.device, stream); });
}

void peer_sum(const PeerSum& sum, Stream stream) {
  constexpr const char* kOp = "peer_sum";
  const TensorView& own = sum.own;
  check::input(own, kOp, "own");
  check::alike(sum.out, own.dtype, own, kOp, "out");
  check::same_device(own, sum.memory, kOp, "own");
  if (sum.bias) check::vector(sum.bias, own.cols(), own.dtype, own, kOp, "the bias");
  const Group group(sum.group, sum.slot, kOp);
  require(own.bytes() <= group.room(), Kind::Value, kOp, "expected at most ", group.room(),
          " bytes, got ", own);
  const PeerTransfer all{sum.memory, sum.group, kAllOthers, sum.slot};
  peer_receive(all, stream);
  const SumParts parts{.own = own,
                       .first = group.from(kAllOthers).front().data,
                       .stride = group.room(),
                       .count = group.ranks() - 1,
                       .bias = sum.bias,
                       .out = sum.out};
  on_device<cpu::sum_parts, cuda::sum_parts>(own, parts, stream);
  peer_release(all, stream);
}

void peer_finish(const PeerTransfer& to, Stream stream) {
  const int64_t sent = Group(to, "peer_finish").sent();
  on_device(
      to.memory, [] {}, [&] { cuda::peer_finish(sent, to.memory.device, stream); });
}

}  // namespace te
