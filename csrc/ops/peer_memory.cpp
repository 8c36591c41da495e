#include "ops/peer_memory.h"

#include <algorithm>

#include "ops/check.h"
#include "ops/dispatch.h"

namespace te {
namespace {

// How many ranks send to a rank.
int senders(int ranks, bool ring) { return ring ? std::min(2, ranks - 1) : ranks - 1; }

class Group {
 public:
  explicit Group(const PeerTransfer& transfer, const char* op)
      : fields_(transfer.group.ptr<int64_t>()),
        ranks_(static_cast<int>(transfer.group.numel() - index(PeerField::Addresses))),
        slot_(transfer.slot),
        rank_(transfer.rank) {
    check::vector(transfer.group, transfer.group.numel(), DType::Int64, op, "group");
    require(transfer.group.device.type == DeviceType::CPU && ranks_ > 1, Kind::Value, op,
            "expected a group of two or more ranks on the CPU, got ", transfer.group);
    require(rank_ >= 0 && rank_ < ranks_ && rank_ != own() && slot_ >= 0 && slot_ < kPeerSlots,
            Kind::Value, op, "expected another rank of ", ranks_, " and a slot of ", kPeerSlots,
            ", got rank ", rank_, " and slot ", slot_);
  }

  int own() const { return static_cast<int>(at(PeerField::Rank)); }
  int64_t room() const { return at(PeerField::Room); }
  char* memory_of(int rank) const {
    return reinterpret_cast<char*>(fields_[index(PeerField::Addresses) + rank]);
  }
  int64_t& last_stream() const { return fields_[index(PeerField::LastStream)]; }
  PeerSlot to_other() const { return between(own(), rank_); }
  PeerSlot from_other() const { return between(rank_, own()); }
  int64_t sent() const { return fields_[index(PeerField::Sent) + slot_]; }
  AwaitedRank other() const {
    return {.rank = rank_, .timeout = at(PeerField::Timeout), .lock_file = at(PeerField::LockFile)};
  }
  cuda::PeerEvents events() const {
    return {.send_stream = at(PeerField::SendStream),
            .computed = at(PeerField::Computed),
            .sent = sent()};
  }

 private:
  static int index(PeerField field) { return static_cast<int>(field); }
  int64_t at(PeerField field) const { return fields_[index(field)]; }

  bool ring() const { return at(PeerField::Ring) != 0; }

  PeerSlot between(int sender, int receiver) const {
    const int distance = (receiver - sender + ranks_) % ranks_;
    require(!ring() || distance == 1 || distance == ranks_ - 1, Kind::Value, "peer_memory",
            "expected the next rank of a ring or the previous one, got ", receiver, " from ",
            sender);
    const int number = (ring() ? std::min(distance, 2) : distance) - 1;
    return {.data = memory_of(receiver) + room() * (kPeerSlots * number + slot_),
            .free = flag(sender, slot_ * ranks_ + receiver),
            .arrived = flag(receiver, (kPeerSlots + slot_) * ranks_ + sender)};
  }
  void* flag(int owner, int number) const {
    const int64_t slots = kPeerSlots * senders(ranks_, ring()) * room();
    return memory_of(owner) + slots + kPeerFlagBytes * number;
  }

  int64_t* fields_;
  int ranks_, slot_, rank_;
};

}  // namespace

int64_t peer_memory_bytes(int ranks, int64_t room, bool ring) {
  return kPeerSlots * (senders(ranks, ring) * room + int64_t{2} * ranks * kPeerFlagBytes);
}

int64_t peer_slot_offset(const PeerTransfer& from) {
  const Group group(from, "peer_memory");
  return group.from_other().data - group.memory_of(group.own());
}

void peer_send(const TensorView& x, const PeerTransfer& to, Stream stream) {
  const Group group(to, "peer_send");
  check::same_device(x, to.memory, "peer_send", "x");
  require(x.bytes() <= group.room(), Kind::Value, "peer_send", "expected at most ", group.room(),
          " bytes, got ", x);
  const Rows rows = rows_of(x, "peer_send", "x");
  on_device(
      x, [&] { cpu::peer_send(rows, group.to_other(), group.other()); },
      [&] { cuda::peer_send(rows, group.to_other(), group.events(), x.device, stream); });
}

void peer_receive(const PeerTransfer& from, Stream stream) {
  const Group group(from, "peer_receive");
  void* const arrived = group.from_other().arrived;
  on_device(
      from.memory, [&] { cpu::peer_receive(arrived, group.other()); },
      [&] { cuda::peer_receive(arrived, group.last_stream(), from.memory.device, stream); });
}

void peer_release(const PeerTransfer& from, Stream stream) {
  void* const free = Group(from, "peer_release").from_other().free;
  on_device(
      from.memory, [&] { cpu::peer_release(free); },
      [&] { cuda::peer_release(free, from.memory.device, stream); });
}

void peer_finish(const PeerTransfer& to, Stream stream) {
  const int64_t sent = Group(to, "peer_finish").sent();
  on_device(
      to.memory, [] {}, [&] { cuda::peer_finish(sent, to.memory.device, stream); });
}

}  // namespace te
