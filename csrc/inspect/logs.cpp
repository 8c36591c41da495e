#include "inspect/logs.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <ctime>

#include "core/error.h"
#include "inspect/node.h"

namespace te::inspect {

namespace {

// localtime_r locks a mutex of the C library. No fork happens while this mutex is held, so a child
// does not inherit that one locked.
ForkMutex g_local_time;

std::string not_finite(double value) {
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

std::string quoted(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return '"' + one_line(result) + '"';
}

std::string json_of_value(const std::optional<double>& value) {
  if (!value) return "null";
  return std::isfinite(*value) ? shortest(*value) : quoted(not_finite(*value));
}

}  // namespace

std::string text_of_value(double value) {
  if (!std::isfinite(value)) return not_finite(value);
  char buffer[400];  // the largest double has 309 digits before the point
  constexpr auto kFixed = std::chars_format::fixed;  // with a dot, whatever the user's locale is
  return {buffer, std::to_chars(std::begin(buffer), std::end(buffer), value, kFixed, 4).ptr};
}

std::string one_line(const std::string& text) {
  std::string result;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20) {
      char escape[7];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      result += escape;
    } else {
      result += c;
    }
  }
  return result;
}

std::string json_of_row(const StatisticRow& row, int rank) {
  return concat(R"({"iteration": )", row.iteration, R"(, "layer": )", quoted(row.layer),
                R"(, "tensor": )", quoted(row.tensor), R"(, "statistic": )", quoted(row.statistic),
                R"(, "name": )", quoted(row.name), R"(, "value": )", json_of_value(row.value),
                R"(, "rank": )", rank, "}\n");
}

std::string text_of_time(std::chrono::system_clock::time_point time) {
  const auto since_epoch = std::chrono::floor<std::chrono::milliseconds>(time.time_since_epoch());
  const auto seconds = std::chrono::floor<std::chrono::seconds>(since_epoch);
  const std::time_t whole = seconds.count();
  std::tm local{};
  {
    const std::lock_guard lock(g_local_time);
    localtime_r(&whole, &local);
  }
  char date[32], text[48];
  std::strftime(date, sizeof date, "%Y-%m-%d %H:%M:%S", &local);
  std::snprintf(text, sizeof text, "%s,%03d", date,
                static_cast<int>((since_epoch - seconds).count()));
  return text;
}

Logs::Logs(LogOptions options, Clock clock)
    : options_(std::move(options)), clock_(std::move(clock)) {
  if (options_.directory.empty()) return;
  const std::string stamp = options_.stamp.empty() ? "" : options_.stamp + "_";
  const std::string text = concat("nvdlfw_inspect_", stamp, "globalrank-", options_.rank, ".log");
  const std::string root = options_.directory + "/";
  messages_ = std::make_unique<LogFile>(root + "nvdlfw_inspect_logs/" + text);
  if (options_.statistics) {
    statistics_ = std::make_unique<LogFile>(root + "nvdlfw_inspect_statistics_logs/" + text);
    rows_ = std::make_unique<LogFile>(concat(root, "statistics_rank-", options_.rank, ".jsonl"));
  }
  for (LogFile* file : files()) {  // all are locked, so their content is from earlier sessions
    if (file) file->begin(file == rows_.get() ? options_.append_rows : options_.append_text);
  }
}

std::string Logs::stamped(int level, const std::string& text) const {
  const std::string time = options_.timestamps ? text_of_time(clock_()) + " - " : "";
  return time + name_of_level(level) + " - " + text;
}

std::optional<std::string> Logs::message(int level, const std::string& text) {
  if (level < options_.level) return std::nullopt;
  const std::string line = stamped(level, text);
  if (messages_) {
    const std::lock_guard lock(mutex_);
    messages_->add(line + "\n");
    messages_->flush();
  }
  if (level < level::kWarning) return std::nullopt;
  return "NVDLFW INSPECT - " + line;
}

void Logs::add(const StatisticRow& row) {
  if (!rows_) return;
  std::string text;
  if (row.value) {
    char iteration[24];
    std::snprintf(iteration, sizeof iteration, "%06lld", static_cast<long long>(row.iteration));
    text = stamped(level::kInfo, concat(one_line(row.name), " \t\t\t\t iteration=", iteration,
                                        " \t\t\t\t value=", text_of_value(*row.value), "\n"));
  }
  const std::string json = json_of_row(row, options_.rank);
  const std::lock_guard lock(mutex_);
  if (!text.empty()) statistics_->add(text);
  rows_->add(json);
}

std::optional<std::string> Logs::flush() {
  const std::lock_guard lock(mutex_);
  std::optional<std::string> said;
  for (LogFile* file : files()) {
    if (!file) continue;
    const bool written = file->flush();
    if (file->was_removed()) {
      said = concat(said ? *said + "\n" : "", "[logs] ", file->path(),
                    " was removed with the lines in it; a new file goes on");
    }
    if (written || complained_) continue;
    complained_ = true;
    said = concat(said ? *said + "\n" : "", "[logs] cannot write ", file->path(), ": ",
                  file->error(), "; training goes on, up to ", LogFile::kBound >> 20,
                  " MiB are kept and written when that works again");
  }
  return said;
}

std::optional<std::string> Logs::finish() {
  const std::lock_guard lock(mutex_);
  std::string lost;
  for (LogFile* file : files()) {
    if (!file) continue;
    file->flush();
    file->synchronize();
    if (file->dropped() || file->unwritten()) {
      lost += concat(lost.empty() ? "[logs] lost: " : "; ", file->dropped(), " lines and the last ",
                     file->unwritten(), " bytes of ", file->path());
      if (!file->error().empty()) lost += concat(" (", file->error(), ")");
    }
    file->release();
  }
  return lost.empty() ? std::nullopt : std::optional(lost);
}

}  // namespace te::inspect
