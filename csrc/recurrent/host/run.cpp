// Runs what the host does in a run of a recurrent program, where one kernel runs all steps: packs
// parameters, multiplies whole sequences, allocates, and launches the kernel.
//
// A program is a list of numbers, which hoconv/recurrent/runtime/compiled_host.py writes.
//
// B batch, T time steps, n features.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "hoconv/aten_ops.h"

namespace hoconv::recurrent {
namespace {

using Numbers = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;

// Reads the numbers of a program.
class Reader {
 public:
  explicit Reader(const int64_t* numbers) : at_(numbers) {}

  int64_t next() { return *at_++; }

  // A list, which its length precedes.
  Numbers list() {
    const int64_t count = next();
    const int64_t* first = at_;
    at_ += count;
    return {first, at_};
  }

 private:
  const int64_t* at_;
};

// Names of dtypes, in the order of DTYPES of hoconv/recurrent/ir/evaluate.py.
constexpr std::array<ScalarType, 5> kTypes{ScalarType::Double, ScalarType::Float,
                                           ScalarType::BFloat16, ScalarType::Half,
                                           ScalarType::Bool};

ScalarType read_type(int64_t number) { return kTypes[number]; }

// Zeros (rows, columns) that are all the same one, at an address on the device of `like`.
Tensor view_zeros(const Tensor& like, int64_t address, int64_t rows, int64_t columns,
                  ScalarType type) {
  const Numbers sizes{rows, columns}, strides{0, 0};
  return torch::stable::from_blob(reinterpret_cast<void*>(address), sizes, strides, like.device(),
                                  type);
}

Tensor as_contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

Tensor cast(const Tensor& t, ScalarType type) {
  return t.scalar_type() == type ? t : torch::stable::to(t, type);
}

// What the driver's cuda.h declares; it need not be there.
struct LaunchAttribute {
  int32_t id;
  char pad[4];
  uint32_t value[16];
};

struct LaunchConfiguration {
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  uint32_t attribute_count;
};

constexpr int kCooperative = 2, kClusterDimension = 4;  // CUlaunchAttributeID

using LaunchKernel = int (*)(const LaunchConfiguration*, void* kernel, void** arguments,
                             void** extra);

// A buffer of the kernel: hoconv/recurrent/codegen/storage.py.
struct Buffer {
  enum Kind : int64_t { once, sequence, step, history };
  static constexpr int64_t kMade = -1, kAbsent = -2;

  explicit Buffer(Reader& reader)
      : given(reader.next()),
        kind(Kind(reader.next())),
        type(read_type(reader.next())),
        strided(reader.next() != 0),
        summed(reader.next() != 0),
        features(reader.list()) {}

  Numbers shape(int64_t T, int64_t B) const {
    Numbers sizes;
    if (kind == sequence) sizes.push_back(T);
    if (kind == history) sizes.push_back(T + 1);
    if (kind != once) sizes.push_back(B);
    sizes.insert(sizes.end(), features.begin(), features.end());
    return sizes;
  }

  // Whether a tensor is what the kernel reads through a bare pointer.
  bool fits(const Tensor& t, const Numbers& sizes, const Tensor& like) const {
    const auto own = t.sizes();
    return t.scalar_type() == type && t.device() == like.device() &&
           std::equal(own.begin(), own.end(), sizes.begin(), sizes.end());
  }

  int64_t given;  // which input of the loop it is; or how else the kernel gets it
  Kind kind;
  ScalarType type;
  bool strided;  // whether its tensor need not be contiguous
  bool summed;   // whether it lies beside others of its type, so that one sum takes all
  Numbers features;
};

// The kernel that runs all steps, and its memory.
class Loop {
 public:
  explicit Loop(Reader& reader) {
    length_ = reader.next();
    for (int64_t count = reader.next(); count > 0; --count) buffers_.emplace_back(reader);
    strided_ = reader.list();
    written_ = reader.list();
    last_ = reader.list();
    reverse_ = reader.next() != 0;
    rows_ = reader.next(), blocks_ = reader.next(), clusters_ = reader.next();
    threads_ = reader.next(), shared_bytes_ = reader.next();
    mail_bytes_ = reader.next(), own_bytes_ = reader.next();
    launch_ = reinterpret_cast<LaunchKernel>(reader.next());
    kernel_ = reinterpret_cast<void*>(reader.next());
  }

  // The sequences that the steps write and the states after the last one; nothing if the inputs
  // are not what the kernel reads.
  std::optional<Tensors> run(Tensors inputs, const Tensor* seed, void* stream) const {
    const Tensor& like = inputs[length_];  // a sequence, which knows T and B
    if (like.dim() != 3) return {};
    const int64_t T = like.size(0), B = like.size(1), teams = (B + rows_ - 1) / rows_;
    Numbers call{T, B, reverse_ ? T - 1 : 0,
                 seed ? reinterpret_cast<int64_t>(seed->data_ptr()) : 0};
    std::vector<std::optional<Tensor>> tensors(buffers_.size());
    for (size_t i = 0; i < buffers_.size(); ++i) {
      const Buffer& buffer = buffers_[i];
      if (buffer.given == Buffer::kAbsent) {
        call.push_back(0);
        continue;
      }
      const Numbers sizes = buffer.shape(T, B);
      if (buffer.given == Buffer::kMade) {
        if (!tensors[i]) make_buffers(i, like, sizes, tensors);
      } else {
        const Tensor& given = inputs[buffer.given];
        if (!buffer.fits(given, sizes, like)) return {};
        tensors[i] = buffer.strided ? given : as_contiguous(given);
      }
      call.push_back(reinterpret_cast<int64_t>(tensors[i]->data_ptr()));
    }
    const int64_t all_blocks = teams * blocks_ * clusters_;
    std::optional<Tensor> scratch;
    if (const int64_t bytes = all_blocks * (mail_bytes_ + own_bytes_)) {
      scratch = make_tensor(like, {bytes}, ScalarType::Byte);
      if (const int64_t mail = all_blocks * mail_bytes_) {  // exchanges have numbers from 1 on
        Tensor boxes = strided_view(*scratch, {mail}, {1});
        torch::stable::zero_(boxes);
      }
    }
    call.push_back(scratch ? reinterpret_cast<int64_t>(scratch->data_ptr()) : 0);
    for (const int64_t i : strided_)
      for (const int64_t stride : tensors[i]->strides()) call.push_back(stride);
    if (all_blocks > 0) launch(all_blocks, call, stream);  // else the batch is empty

    Tensors found;
    for (const int64_t i : written_) {
      Tensor& tensor = *tensors[i];
      if (buffers_[i].kind == Buffer::history) {  // without the state after the last step
        Numbers sizes = buffers_[i].shape(T, B),
                own(tensor.strides().begin(), tensor.strides().end());
        sizes[0] = T;
        found.push_back(strided_view(tensor, sizes, own));
      } else {
        found.push_back(tensor);
      }
    }
    for (const int64_t i : last_) found.push_back(*tensors[i]);
    return found;
  }

 private:
  // Makes the tensor of a buffer, and those of the following ones that lie beside it.
  void make_buffers(size_t i, const Tensor& like, const Numbers& sizes,
                    std::vector<std::optional<Tensor>>& tensors) const {
    const Buffer& buffer = buffers_[i];
    size_t end = i + 1;
    while (buffer.summed && end < buffers_.size() && buffers_[end].summed &&
           buffers_[end].type == buffer.type && buffers_[end].features == buffer.features)
      ++end;
    if (end == i + 1) {
      tensors[i] = make_tensor(like, sizes, buffer.type);
      return;
    }
    const int64_t B = sizes[0], n = sizes[1], count = end - i;
    const Tensor all = make_tensor(like, {count, B, n}, buffer.type);
    for (int64_t k = 0; k < count; ++k)
      tensors[i + k] = strided_view(all, {B, n}, {n, 1}, k * B * n);
  }

  void launch(int64_t all_blocks, Numbers& call, void* stream) const {
    LaunchAttribute attributes[2]{};
    attributes[0].id = kClusterDimension;
    attributes[0].value[0] = blocks_, attributes[0].value[1] = attributes[0].value[2] = 1;
    attributes[1].id = kCooperative;
    attributes[1].value[0] = 1;
    LaunchConfiguration given{};
    given.grid[0] = all_blocks, given.grid[1] = given.grid[2] = 1;
    given.block[0] = threads_, given.block[1] = given.block[2] = 1;
    given.shared_bytes = shared_bytes_;
    given.stream = stream;
    given.attributes = attributes;
    given.attribute_count = clusters_ > 1 ? 2 : 1;  // clusters of a team wait for each other
    void* argument = call.data();
    const int status = launch_(&given, kernel_, &argument, nullptr);
    STD_TORCH_CHECK(status == 0, "a kernel of a recurrent cell: error ", status,
                    " of the CUDA driver");
  }

  int64_t length_;
  std::vector<Buffer> buffers_;       // in the order of the kernel's argument
  Numbers strided_, written_, last_;  // buffers
  bool reverse_;
  int64_t rows_, blocks_, clusters_, threads_, shared_bytes_, mail_bytes_, own_bytes_;
  LaunchKernel launch_;
  void* kernel_;
};

// One instruction: hoconv/recurrent/runtime/instructions.py says what each does.
struct Instruction {
  enum Kind : int64_t {
    cat,
    contiguous,
    unsqueeze,
    narrow,
    columns,
    cast,
    linear,
    linear_t,
    outer,
    sum,
    zero_rows,
    zeros,
    zeros_like,
    split,
    loop,
  };

  explicit Instruction(Reader& reader)
      : kind(Kind(reader.next())),
        inputs(reader.list()),
        outputs(reader.list()),
        numbers(reader.list()) {}

  Kind kind;
  Numbers inputs, outputs, numbers;
};

class Program {
 public:
  explicit Program(Reader& reader) : tensors_(reader.next()), given_(reader.next()) {
    for (int64_t count = reader.next(); count > 0; --count) {
      instructions_.emplace_back(reader);
      if (instructions_.back().kind == Instruction::loop) loop_.emplace(reader);
    }
    results_ = reader.list();
    separate_ = reader.next() != 0;
    zero_ = reader.next();
  }

  // The results; none if the tensors are not what the program is for.
  Tensors run(const Tensors& given, const Tensor* seed, void* stream) const {
    STD_TORCH_CHECK(given.size() == given_, "hoconv::recurrent: expected ", given_,
                    " tensors, got ", given.size());
    std::vector<std::optional<Tensor>> tensors(given.begin(), given.end());
    tensors.resize(tensors_);
    for (const Instruction& each : instructions_) {
      Tensors inputs;
      for (const int64_t i : each.inputs) inputs.push_back(*tensors[i]);
      std::optional<Tensors> made = each.kind == Instruction::loop
                                        ? loop_->run(std::move(inputs), seed, stream)
                                        : compute(each, inputs);
      if (!made) return {};
      for (size_t i = 0; i < made->size(); ++i) tensors[each.outputs[i]] = std::move((*made)[i]);
    }
    Tensors found;
    for (const int64_t i : results_) found.push_back(*tensors[i]);
    if (separate_) separate(found, given);
    return found;
  }

 private:
  std::optional<Tensors> compute(const Instruction& each, const Tensors& inputs) const {
    const Tensor& x = inputs[0];
    const Numbers& numbers = each.numbers;
    switch (each.kind) {
      case Instruction::cat:
        return Tensors{call_aten("aten::cat", "", inputs, numbers[0])};
      case Instruction::contiguous:
        return Tensors{as_contiguous(x)};
      case Instruction::unsqueeze:
        return Tensors{torch::stable::unsqueeze(x, 0)};
      case Instruction::narrow:
        return Tensors{torch::stable::narrow(const_cast<Tensor&>(x), 1, numbers[0], numbers[1])};
      case Instruction::columns: {
        const int64_t rows = numbers[0], count = numbers[1], first = numbers[2];
        if (x.size(0) != rows || x.size(1) < first + count) return {};
        return Tensors{strided_view(x, {rows, count}, {x.size(1), 1}, first)};
      }
      case Instruction::cast:
        return Tensors{hoconv::recurrent::cast(x, read_type(numbers[0]))};
      case Instruction::linear:
      case Instruction::linear_t:
        return Tensors{multiply(each.kind == Instruction::linear_t, inputs)};
      case Instruction::outer:
        return Tensors{multiply_outer(inputs)};
      case Instruction::sum:
        return sum(inputs, {numbers.begin() + 1, numbers.end()}, read_type(numbers[0]));
      case Instruction::zero_rows:
        return Tensors{view_zeros(x, zero_, x.size(0), numbers[0], read_type(numbers[1]))};
      case Instruction::zeros:
        return Tensors{torch::stable::new_zeros(x, numbers)};
      case Instruction::zeros_like:
        return Tensors{torch::stable::new_zeros(x, x.sizes())};
      case Instruction::split:
        return split(inputs);
      default:
        return {};
    }
  }

  // Copies what shares memory with an earlier tensor, or with one of `others`.
  static void separate(Tensors& tensors, const Tensors& others) {
    std::set<const void*> taken;
    for (const Tensor& t : others) taken.insert(memory(t));
    for (Tensor& t : tensors) {
      const bool copied = !taken.insert(memory(t)).second;
      t = copied ? torch::stable::clone(t) : as_contiguous(t);
    }
  }

  // The address of a tensor's storage.
  static const void* memory(const Tensor& t) {
    int64_t offset;
    STD_TORCH_CHECK(aoti_torch_get_storage_offset(t.get(), &offset) == 0);
    return static_cast<const char*>(t.data_ptr()) - offset * t.element_size();
  }

  static Tensor transpose(const Tensor& t) {
    return strided_view(t, {t.size(1), t.size(0)}, {t.stride(1), t.stride(0)});
  }

  // (T, B, n) as (T * B, n)
  static Tensor flatten_rows(const Tensor& t) {
    const int64_t rows = t.size(0) * t.size(1), n = t.size(2);
    return t.is_contiguous() ? strided_view(t, {rows, n}, {n, 1})
                             : torch::stable::reshape(t, {rows, n});
  }

  static Tensor multiply(bool transposed, const Tensors& inputs) {
    const Tensor& weight = inputs[1];
    const Tensor x = as_contiguous(hoconv::recurrent::cast(inputs[0], weight.scalar_type()));
    const Tensor rows = flatten_rows(x);
    const Tensor by = transposed ? weight : transpose(weight);
    // Of a weight as aten::linear takes it: that adds a bias within the product.
    const Tensor found = inputs.size() > 2 ? hoconv::linear(rows, transpose(by), inputs[2])
                                           : matrix_product(rows, by);
    const Numbers sizes{x.size(0), x.size(1), found.size(1)};
    return strided_view(found, sizes, contiguous_strides(sizes));
  }

  // g^T x of the first input with each of the others, beside each other.
  static Tensor multiply_outer(const Tensors& inputs) {
    const Tensor g = transpose(flatten_rows(inputs[0]));
    if (inputs.size() == 2) return matrix_product(g, flatten_rows(inputs[1]));
    const int64_t rows = g.size(0);
    int64_t width = 0, first = 0;
    for (size_t i = 1; i < inputs.size(); ++i) width += inputs[i].size(2);
    const Tensor out = make_tensor(g, {rows, width});
    for (size_t i = 1; i < inputs.size(); ++i) {
      const int64_t n = inputs[i].size(2);
      const Tensor target = strided_view(out, {rows, n}, {width, 1}, first);
      call_aten("aten::mm", "out", g, flatten_rows(inputs[i]), target);
      first += n;
    }
    return out;
  }

  static Tensors sum(const Tensors& inputs, const Numbers& dims, ScalarType type) {
    const Tensor& first = inputs[0];
    if (inputs.size() > 1 && lie_beside(inputs)) {
      const int64_t count = inputs.size(), B = first.size(0), n = first.size(1);
      const Tensor all = strided_view(first, {count, B, n}, {B * n, n, 1});
      const Tensor sums = torch::stable::sum(all, Numbers{1}, /*keepdim=*/false, type);
      Tensors found;
      for (int64_t k = 0; k < count; ++k) found.push_back(strided_view(sums, {n}, {1}, k * n));
      return found;
    }
    Tensors found;
    for (const Tensor& t : inputs)
      found.push_back(torch::stable::sum(t, dims, /*keepdim=*/false, type));
    return found;
  }

  // Whether contiguous tensors of one shape (B, n) and dtype follow each other in memory.
  static bool lie_beside(const Tensors& tensors) {
    const Tensor& first = tensors[0];
    const char* expected = static_cast<const char*>(first.data_ptr());
    for (const Tensor& t : tensors) {
      if (t.dim() != 2 || !t.is_contiguous() || t.scalar_type() != first.scalar_type() ||
          t.size(0) != first.size(0) || t.size(1) != first.size(1) || memory(t) != memory(first) ||
          t.data_ptr() != expected)
        return false;
      expected += t.numel() * t.element_size();
    }
    return true;
  }

  // Rows of the first input, as many as each of the others has.
  static Tensors split(const Tensors& inputs) {
    const Tensor& whole = inputs[0];
    Numbers sizes(whole.sizes().begin(), whole.sizes().end());
    const Numbers strides(whole.strides().begin(), whole.strides().end());
    Tensors found;
    int64_t first = 0;
    for (size_t i = 1; i < inputs.size(); ++i) {
      sizes[0] = inputs[i].size(0);
      found.push_back(strided_view(whole, sizes, strides, first * strides[0]));
      first += sizes[0];
    }
    return found;
  }

  size_t tensors_;  // how many there are
  size_t given_;    // how many of them are given, the first ones
  std::vector<Instruction> instructions_;
  std::optional<Loop> loop_;
  Numbers results_;
  bool separate_;  // whether results may share memory
  int64_t zero_;   // the address of a zero of any dtype, which nothing writes to
};

Tensors run_host(int64_t program, Tensors given, std::optional<Tensor> seed, int64_t stream) {
  return reinterpret_cast<const Program*>(program)->run(given, seed ? &*seed : nullptr,
                                                        reinterpret_cast<void*>(stream));
}

}  // namespace
}  // namespace hoconv::recurrent

extern "C" void* hoconv_recurrent_make_program(const int64_t* numbers) {
  hoconv::recurrent::Reader reader(numbers);
  return new hoconv::recurrent::Program(reader);
}

extern "C" void hoconv_recurrent_free_program(void* program) {
  delete static_cast<hoconv::recurrent::Program*>(program);
}

STABLE_TORCH_LIBRARY_FRAGMENT(hoconv, m) {
  m.def("recurrent.host(int program, Tensor[] given, Tensor? seed, int stream) -> Tensor[]");
  m.def(
      "recurrent.zeros(Tensor like, int address, int rows, int columns, ScalarType dtype) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(hoconv, CPU, m) {
  m.impl("recurrent.host", TORCH_BOX(&hoconv::recurrent::run_host));
  m.impl("recurrent.zeros", TORCH_BOX(&hoconv::recurrent::view_zeros));
}

STABLE_TORCH_LIBRARY_IMPL(hoconv, CUDA, m) {
  m.impl("recurrent.host", TORCH_BOX(&hoconv::recurrent::run_host));
  m.impl("recurrent.zeros", TORCH_BOX(&hoconv::recurrent::view_zeros));
}
