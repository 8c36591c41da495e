// Compares core/moments.h with the definitions of the statistics in float64.
#include "core/moments.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace te {
namespace {

using Values = std::vector<double>;

Moments moments_of(const Values& values, double pivot = 0.0) {
  MomentSums sums = MomentSums::empty();
  for (const double value : values) sums.add(value, pivot);
  return sums.about(pivot);
}

Values normal(size_t count, double mean, double std, unsigned seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<double> distribution(mean, std);
  Values values(count);
  for (double& value : values) value = distribution(random);
  return values;
}

// The statistics by their definitions, which take two passes.
Statistics by_definition(const Values& values) {
  const auto count = static_cast<double>(values.size());
  double sum = 0, absolute = 0, squares = 0, deviations = 0, smallest = kInfinity;
  for (const double value : values) {
    sum += value;
    absolute += std::fabs(value);
    squares += value * value;
    if (value != 0) smallest = std::min(smallest, std::fabs(value));
  }
  for (const double value : values) deviations += (value - sum / count) * (value - sum / count);
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  const double amax = std::max(-*low, *high);
  return {*low,        *high,
          sum / count, std::sqrt(deviations / (count - 1)),
          absolute,    std::sqrt(squares),
          amax,        std::log2(amax) - std::log2(smallest)};
}

void expect_near(double actual, double expected, double relative) {
  EXPECT_NEAR(actual, expected, relative * std::fabs(expected));
}

void expect_statistics(const Moments& row, const Values& values) {
  const Statistics actual = statistics_of(row), expected = by_definition(values);
  EXPECT_EQ(row.count, static_cast<double>(values.size()));
  EXPECT_EQ(actual.min, expected.min);
  EXPECT_EQ(actual.max, expected.max);
  EXPECT_EQ(actual.cur_amax, expected.cur_amax);
  EXPECT_NEAR(actual.mean, expected.mean, 1e-6 * expected.cur_amax);
  expect_near(actual.std, expected.std, 1e-4);
  expect_near(actual.l1_norm, expected.l1_norm, 1e-6);
  expect_near(actual.l2_norm, expected.l2_norm, 1e-6);
  EXPECT_DOUBLE_EQ(actual.dynamic_range, expected.dynamic_range);
}

TEST(Moments, FollowTheDefinition) {
  for (const double mean : {0.0, 3.0, -100.0, 1e6})
    for (const double pivot : {0.0, mean}) {
      const Values values = normal(5000, mean, 1.0);
      expect_statistics(moments_of(values, pivot), values);
    }
}

TEST(Moments, DoNotDependOnHowTheyAreMerged) {
  const Values values = normal(10000, 100.0, 1.0);
  for (const std::vector<size_t>& ends :
       {std::vector<size_t>{10000}, {1, 10000}, {0, 0, 10000, 10000}, {3, 3, 5000, 9999, 10000}}) {
    Moments row = Moments::empty();
    size_t first = 0;
    for (const size_t end : ends) {
      merge(row, moments_of(Values(values.begin() + static_cast<ptrdiff_t>(first),
                                   values.begin() + static_cast<ptrdiff_t>(end)),
                            100.0));
      first = end;
    }
    expect_statistics(row, values);
  }
}

TEST(Moments, ShiftToAnotherPivot) {
  const Values values = normal(1000, 100.0, 1.0);
  for (const double pivot : {0.0, 100.0, -1e4}) {
    MomentSums sums = MomentSums::empty();
    for (const double value : values) sums.add(value, 99.0);
    sums.shift(99.0 - pivot);
    expect_statistics(sums.about(pivot), values);
  }
}

TEST(Moments, OfNothing) {
  Moments row = Moments::empty();
  merge(row, moments_of({}));
  EXPECT_EQ(row.count, 0);
  EXPECT_EQ(row.min, kInfinity);
  EXPECT_EQ(row.max, -kInfinity);
  EXPECT_EQ(row.amax, 0);
  EXPECT_EQ(row.smallest, kInfinity);
  EXPECT_TRUE(std::isnan(statistics_of(row).mean));
  EXPECT_TRUE(std::isnan(statistics_of(row).dynamic_range));
  EXPECT_EQ(statistics_of(row).l1_norm, 0);
}

TEST(Moments, OfOneElement) {
  const Statistics statistics = statistics_of(moments_of({-2.5}));
  EXPECT_EQ(statistics.min, -2.5);
  EXPECT_EQ(statistics.max, -2.5);
  EXPECT_EQ(statistics.mean, -2.5);
  EXPECT_TRUE(std::isnan(statistics.std));
  EXPECT_EQ(statistics.l1_norm, 2.5);
  EXPECT_EQ(statistics.dynamic_range, 0);
}

TEST(Moments, OfZeros) {
  const Moments row = moments_of({0.0, -0.0, 0.0});
  EXPECT_EQ(row.nonzeros, 0);
  EXPECT_FALSE(std::signbit(row.min));
  EXPECT_EQ(statistics_of(row).std, 0);
  EXPECT_EQ(statistics_of(row).cur_amax, 0);
  EXPECT_TRUE(std::isnan(statistics_of(row).dynamic_range));
}

TEST(Moments, NanIsCountedAndSpreads) {
  Moments row = moments_of({1.0, kNaN, -3.0, 0.0});
  merge(row, moments_of({2.0}));
  EXPECT_EQ(row.nans, 1);
  EXPECT_EQ(row.count, 5);
  for (const double value :
       {row.mean, row.m2, row.sum_abs, row.sum_squares, row.min, row.max, row.amax})
    EXPECT_TRUE(std::isnan(value));
  EXPECT_EQ(row.smallest, 1.0);
}

TEST(Moments, InfinitiesAreCountedAndSpread) {
  for (const bool first : {true, false}) {
    Moments row = moments_of(first ? Values{1.0, -kInfinity} : Values{2.0});
    merge(row, moments_of(first ? Values{2.0} : Values{1.0, -kInfinity}));
    EXPECT_EQ(row.infs, 1);
    EXPECT_EQ(row.mean, -kInfinity);
    EXPECT_TRUE(std::isnan(row.m2));
    EXPECT_EQ(row.sum_abs, kInfinity);
    EXPECT_EQ(row.sum_squares, kInfinity);
    EXPECT_EQ(row.min, -kInfinity);
    EXPECT_EQ(row.max, 2.0);
    EXPECT_EQ(row.amax, kInfinity);
  }
}

TEST(Moments, BothInfinitiesHaveNoMean) {
  EXPECT_TRUE(std::isnan(moments_of({kInfinity, -kInfinity}).mean));
}

TEST(CastMoments, Merge) {
  CastMoments row = CastMoments::empty();
  merge(row, CastMoments::empty());
  EXPECT_TRUE(std::isnan(statistics_of(row).mse));
  CastMoments part{8, 2, 1, 4.0, kInfinity, 0, {}};
  part.add_scale_inverse(0.5);
  merge(row, part);
  part.add_scale_inverse(0.25);
  part.add_scale_inverse(0.0);
  merge(row, part);
  const CastStatistics statistics = statistics_of(row);
  EXPECT_EQ(statistics.underflows_percent, 25);
  EXPECT_EQ(statistics.overflows_percent, 12.5);
  EXPECT_EQ(statistics.mse, 0.5);
  EXPECT_EQ(statistics.min_scale_inv, 0.25);
  EXPECT_EQ(statistics.max_scale_inv, 0.5);
}

TEST(Rows, MergeAsTheirKindsDo) {
  const auto moments = [](const double* row) { return *reinterpret_cast<const Moments*>(row); };
  double row[kRowFields] = {}, other[kRowFields] = {};
  *reinterpret_cast<Moments*>(row) = moments_of({1.0, 2.0});
  *reinterpret_cast<Moments*>(other) = moments_of({-4.0});
  merge(RowKind::Moments, row, other);
  expect_statistics(moments(row), {1.0, 2.0, -4.0});

  double casts[kRowFields] = {10, 1, 2, 0.5, 0.25, 0.25};
  const double more[kRowFields] = {30, 3, 0, 0.25, 0.5, 0.5};
  merge(RowKind::Casts, casts, more);
  const double of_both[] = {40, 4, 2, 0.75, 0.25, 0.5};
  for (int i = 0; i < 6; ++i) EXPECT_EQ(casts[i], of_both[i]) << i;

  double blocks[kRowFields] = {4, 7};
  const double larger_blocks[kRowFields] = {2, 9}, nan_blocks[kRowFields] = {1, kNaN};
  merge(RowKind::Blocks, blocks, larger_blocks);
  EXPECT_EQ(blocks[0], 6);
  EXPECT_EQ(blocks[1], 9);
  merge(RowKind::Blocks, blocks, nan_blocks);
  EXPECT_TRUE(std::isnan(blocks[1]));
}

TEST(Rows, OfNothingChangeNothing) {
  double row[kRowFields] = {};
  const double nothing[kRowFields] = {};
  *reinterpret_cast<Moments*>(row) = moments_of({1.0, 2.0});
  double before[kRowFields];
  std::copy_n(row, kRowFields, before);
  merge(RowKind::Moments, row, nothing);
  for (int i = 0; i < kRowFields; ++i) EXPECT_EQ(row[i], before[i]) << i;
}

}  // namespace
}  // namespace te
