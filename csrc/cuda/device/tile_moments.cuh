// Moments of a matrix, taken tile by tile in the kernel that has its values in registers.
//
// A block writes the sums of its tile to global memory. Tiles are divided into groups: the last
// warp to finish within a group merges the sums of the group's tiles, and the last of these warps
// merges the sums of the groups, always in the same order. All sums have a pivot of zero, in fp64:
// for 16-bit floats no digit that matters is lost, however far their mean is from zero.
#pragma once

#include "cuda/device/merge_rows.cuh"
#include "cuda/device/moment_fields.cuh"
#include "cuda/device/packed_moments.cuh"

namespace te::cuda {

// What a thread gathers: packed moments, or nothing if none are asked for.
struct NoMoments {};
template <class In, bool kMoments, class Folded = float>
using GatheredMoments = std::conditional_t<kMoments, PackedMoments<In, Folded>, NoMoments>;
template <class Gathered>
inline constexpr bool kTakesMoments = !std::is_same_v<Gathered, NoMoments>;

// Calls f(whether to take moments), a constant. They are taken of 16-bit values that are read and
// written by wide accesses.
template <class In, bool kWide, class F>
void dispatch_moments(bool wanted, F&& f) {
  if constexpr (kWide && sizeof(In) == 2)
    dispatch_bool(wanted, f);
  else
    f(std::false_type{});
}

// Device-side form of MomentsSink.
struct TileMomentsSink {
  RowSink<Moments> out;         // its fields are the sums of groups
  unsigned* tickets = nullptr;  // [kMomentsBlocks]: one for each group
  double* tiles = nullptr;      // [field][count]: the sums of tiles
  int count = 0;                // number of tiles
  int group = 0;                // tiles in a group
  double elements = 0;          // elements of the matrix

  __device__ __forceinline__ explicit operator bool() const { return out.row && !out.is_idle(); }
  __device__ __forceinline__ int groups() const { return (count + group - 1) / group; }
};

inline TileMomentsSink tile_moments_sink_of(const MomentsSink& sink, int64_t tiles,
                                            int64_t elements) {
  if (!sink) return {};
  require(sink.workspace.bytes() >= tile_moments_bytes(tiles), Kind::Internal, "moments",
          "expected a workspace for ", tiles, " tiles, got ", sink.workspace.bytes(), " bytes");
  auto* memory = sink.workspace.ptr<char>() + moments_workspace_bytes();
  TileMomentsSink result{row_sink_of<Moments>(sink)};
  result.tickets = reinterpret_cast<unsigned*>(memory);
  result.tiles = reinterpret_cast<double*>(memory + kMomentsBlocks * sizeof(unsigned));
  result.count = static_cast<int>(tiles);
  result.group = static_cast<int>(32 * ceil_div(tiles, 32 * kMomentsBlocks));
  result.elements = static_cast<double>(elements);
  return result;
}

// Draws a ticket for the calling warp. Returns whether it is the last one of `count`; if so, the
// ticket is reset.
__device__ __forceinline__ bool is_last_warp(unsigned* ticket, int count) {
  const bool draws = threadIdx.x % 32 == 0;
  unsigned drawn = 0;
  __syncwarp();
  if (draws) drawn = draw(ticket);
  const bool is_last = __shfl_sync(0xffffffffu, drawn, 0) == static_cast<unsigned>(count) - 1;
  if (draws && is_last) *ticket = 0;
  return is_last;
}

// Merges `count` columns of [field][pitch]; all lanes of the warp get the result.
__device__ __forceinline__ void merge_columns(const double* from, int pitch, int count,
                                              double (&total)[kMomentFields]) {
#pragma unroll
  for (int f = 0; f < kMomentFields; ++f) total[f] = f < kMomentFieldsThatAdd ? 0.0 : kInfinity;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32)
#pragma unroll
    for (int f = 0; f < kMomentFields; ++f) {
      const double value = __ldcg(from + int64_t{f} * pitch + i);
      total[f] = f < kMomentFieldsThatAdd ? total[f] + value : fmin(total[f], value);
    }
#pragma unroll
  for (int f = 0; f < kMomentFields; ++f)
    total[f] = f < kMomentFieldsThatAdd ? warp_add(total[f]) : warp_min(total[f]);
}

// In shared memory. Every warp calls leave() before a barrier of the block; one warp calls finish()
// after it.
template <int kWarps>
struct TileMoments {
  static constexpr int kFieldsOfRow = sizeof(Moments) / sizeof(double);
  static_assert(kFieldsOfRow <= 32);

  double part[kMomentFields][kWarps];
  Moments row;

  __device__ __forceinline__ void leave(const MomentSums& sums) {
    if (threadIdx.x % 32 != 0) return;
    const MomentFields fields(sums);
#pragma unroll
    for (int f = 0; f < kMomentFields; ++f) part[f][threadIdx.x / 32] = fields.at[f];
  }

  __device__ __forceinline__ void finish(const TileMomentsSink& sink, int tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kMomentFields) {
      double found = part[lane][0];
#pragma unroll
      for (int warp = 1; warp < kWarps; ++warp)
        found =
            lane < kMomentFieldsThatAdd ? found + part[lane][warp] : fmin(found, part[lane][warp]);
      sink.tiles[int64_t{lane} * sink.count + tile] = found;
    }
    const int group = tile / sink.group, first = group * sink.group;
    const int of_group = min(sink.group, sink.count - first);
    if (!is_last_warp(sink.tickets + group, of_group)) return;
    double total[kMomentFields];
    merge_columns(sink.tiles + first, sink.count, of_group, total);
    if (lane == 0) {
#pragma unroll
      for (int f = 0; f < kMomentFields; ++f)
        sink.out.fields[f * kMomentsBlocks + group] = total[f];
    }
    if (!is_last_warp(sink.out.ticket, sink.groups())) return;
    merge_columns(sink.out.fields, kMomentsBlocks, sink.groups(), total);
    // The row and the fields go through shared memory: together they would fill the registers.
    if (lane < kFieldsOfRow)
      reinterpret_cast<double*>(&row)[lane] = reinterpret_cast<const double*>(sink.out.row)[lane];
    if (lane == 0) {
#pragma unroll
      for (int f = 0; f < kMomentFields; ++f) part[f][0] = total[f];
    }
    __syncwarp();
    if (lane == 0) {
      double all[kMomentFields];
#pragma unroll
      for (int f = 0; f < kMomentFields; ++f) all[f] = part[f][0];
      merge(row, sums_from(all, sink.elements).about(0));
      *sink.out.row = row;
    }
  }
};

}  // namespace te::cuda
