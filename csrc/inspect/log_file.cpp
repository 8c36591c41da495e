#include "inspect/log_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "core/error.h"

namespace te::inspect {

LogFile::LogFile(std::string path, bool append) : path_(std::move(path)), process_(getpid()) {
  const std::filesystem::path folder = std::filesystem::path(path_).parent_path();
  std::error_code error;
  if (!folder.empty()) std::filesystem::create_directories(folder, error);
  require(!error, Kind::Value, "initialize", "expected a log_dir that can be written, got ", folder,
          ": ", error.message());
  const int flags = O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC | (append ? 0 : O_TRUNC);
  file_ = open(path_.c_str(), flags, 0666);
  require(file_ >= 0, Kind::Value, "initialize", "expected a log_dir that can be written, got ",
          path_, ": ", std::strerror(errno));
  if (append) end_torn_line();
}

LogFile::~LogFile() {
  flush();
  close(file_);
}

void LogFile::end_torn_line() {
  const off_t size = lseek(file_, 0, SEEK_END);
  char last = '\n';
  if (size > 0 && pread(file_, &last, 1, size - 1) == 1 && last != '\n') unwritten_.push_back('\n');
}

void LogFile::add(std::string_view line) {
  unwritten_ += line;
  if (unwritten_.size() <= kBound) return;
  const size_t begin =
      inside_line_ ? unwritten_.find('\n') + 1 : 0;  // a line that has begun must be ended
  size_t end = begin;
  while (unwritten_.size() - (end - begin) > kBound / 2) {
    end = unwritten_.find('\n', end) + 1;
    ++dropped_;
  }
  unwritten_.erase(begin, end - begin);
}

bool LogFile::flush() {
  if (getpid() != process_) {
    unwritten_.clear();
    return true;
  }
  size_t written = 0;
  while (written < unwritten_.size()) {
    const ssize_t count = write(file_, unwritten_.data() + written, unwritten_.size() - written);
    if (count > 0) {
      written += static_cast<size_t>(count);
    } else if (errno != EINTR) {
      error_ = std::strerror(errno);
      break;
    }
  }
  if (written > 0) inside_line_ = unwritten_[written - 1] != '\n';
  unwritten_.erase(0, written);
  return unwritten_.empty();
}

}  // namespace te::inspect
