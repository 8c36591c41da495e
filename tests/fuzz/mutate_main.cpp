// A fuzzer for compilers without libFuzzer. It runs LLVMFuzzerTestOneInput on every file of a
// folder, then on random mutations of the files until the time is up. The seed is fixed. Each input
// is written to the file crash-input before it runs, so that a crash leaves the input there. An
// input that takes longer than 10 s is an error, too.
//   config_fuzzer <corpus> [seconds]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kWords[] = {"\n",
                                  "  ",
                                  ": ",
                                  "- ",
                                  "[",
                                  "]",
                                  "{",
                                  "}",
                                  ", ",
                                  "&a ",
                                  "*a",
                                  "<<: ",
                                  "'",
                                  "\"",
                                  "#",
                                  "\t",
                                  "!!",
                                  "---\n",
                                  "|\n",
                                  "? ",
                                  "0",
                                  "-1",
                                  "9999999999999999999",
                                  "yes",
                                  "~",
                                  "all",
                                  "enabled",
                                  "layers",
                                  "gemms",
                                  "tensors_struct",
                                  "stats",
                                  "\xff",
                                  "\xc3\xa9"};

class Mutator {
 private:
  int below(size_t n) { return static_cast<int>(random_() % std::max<size_t>(n, 1)); }

  template <class Items>
  auto& pick(Items& items) {
    return items[static_cast<size_t>(below(std::size(items)))];
  }

 public:
  explicit Mutator(std::vector<std::string> corpus) : corpus_(std::move(corpus)) {}

  std::string next() {
    std::string text = pick(corpus_);
    for (int i = below(8); i >= 0; --i) change(text);
    return text.substr(0, 1 << 16);
  }

 private:
  void change(std::string& text) {
    const size_t at = static_cast<size_t>(below(text.size() + 1));
    const size_t length = static_cast<size_t>(below(16));
    switch (below(6)) {
      case 0: text.insert(at, pick(kWords)); break;
      case 1: text.erase(at, length); break;
      case 2: text.insert(at, text.substr(at, length * 4)); break;
      case 3: {
        const std::string& other = pick(corpus_);
        text.insert(at, other.substr(static_cast<size_t>(below(other.size())), length * 8));
        break;
      }
      case 4:
        if (at < text.size()) text[at] = static_cast<char>(below(256));
        break;
      default:
        for (int i = below(64); i > 0; --i) text.insert(at, pick(kWords));
    }
  }

  std::vector<std::string> corpus_;
  std::mt19937 random_{20240229};
};

void run(const std::string& text) {
  {
    std::ofstream("crash-input", std::ios::binary) << text;  // stays after a crash
  }
  const auto begin = Clock::now();
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(text.data()), text.size());
  if (Clock::now() - begin > std::chrono::seconds(10)) {
    std::fprintf(stderr, "an input of %zu bytes took more than 10 s: crash-input\n", text.size());
    std::exit(1);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    std::fprintf(stderr, "usage: %s <corpus> [seconds]\n", arguments[0]);
    return 2;
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(arguments[1]))
    files.push_back(entry);
  std::sort(files.begin(), files.end());
  std::vector<std::string> corpus;
  for (const auto& file : files) {
    std::ifstream stream(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>());
  }
  if (corpus.empty()) return 2;
  for (const std::string& text : corpus) run(text);
  const auto end = Clock::now() + std::chrono::seconds(count > 2 ? std::atoi(arguments[2]) : 10);
  Mutator mutator(corpus);
  size_t inputs = corpus.size();
  for (; Clock::now() < end; ++inputs) run(mutator.next());
  std::filesystem::remove("crash-input");
  std::printf("%zu inputs, none crashed\n", inputs);
  return 0;
}
