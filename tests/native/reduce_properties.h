// What holds beside equality with the reference. Included by test_reduce.cpp, whose helpers it
// uses.
#pragma once

namespace {

// All 65536 values of both formats: converted to fp32 and back they are unchanged (NaN canonical),
// and in sums with values that force rounding they equal the reference.
void every_half(const ReduceKernels& variant) {
  for (DType dtype : {DType::f16, DType::bf16}) {
    std::vector<std::uint16_t> all(65536), small(65536), out(65536), expected(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    const void* inputs[] = {all.data(), small.data()};
    ReduceArgs args;
    args.inputs = inputs;
    args.count = all.size();
    args.dtype = dtype;
    args.n = 1;
    args.out = out.data();
    variant.reduce(args);
    const std::uint16_t infinity = dtype == DType::f16 ? 0x7c00 : 0x7f80;
    const std::uint16_t nan = dtype == DType::f16 ? 0x7e00 : 0x7fc0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const std::uint16_t want = (i & 0x7fff) > infinity ? nan : all[i];
      check::that(out[i] == want, variant.name, " ", name_of(dtype), " ", i, " became ", out[i]);
    }
    // Near half a unit of the first: ties and their neighbours.
    args.n = 2;
    for (int shift = 0; shift < 3; ++shift) {
      const int binades = (dtype == DType::f16 ? 11 : 8) << (dtype == DType::f16 ? 10 : 7);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const int magnitude = static_cast<int>(i & 0x7fff) - binades + shift - 1;
        small[i] = static_cast<std::uint16_t>(std::max(magnitude, 0) | (below(2) << 15));
      }
      args.out = out.data();
      variant.reduce(args);
      args.out = expected.data();
      reference::reduce(args);
      for (std::size_t i = 0; i < all.size(); ++i) {
        check::that(out[i] == expected[i], variant.name, " ", name_of(dtype), " ", i, " + ",
                    small[i], " = ", out[i], ", expected ", expected[i]);
      }
    }
  }
}

// An array reduced in pieces, anywhere cut, has the bits of the array reduced at once.
void cuts(const ReduceKernels& variant) {
  for (DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16, DType::i32}) {
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::avg, ReduceOp::product}) {
      const std::size_t count = 4000 + below(1000), size = size_of(dtype);
      const int n = 2 + static_cast<int>(below(5));
      std::vector<Array> inputs;
      for (int k = 0; k < n; ++k) {
        inputs.emplace_back(count * size, 0);
        fill(inputs.back(), dtype);
      }
      Array whole(count * size, 0), pieces(count * size, 0);
      std::vector<const void*> pointers(n);
      ReduceArgs args;
      args.inputs = pointers.data();
      args.n = n;
      args.dtype = dtype;
      args.op = op;
      args.divisor = n;
      const auto part = [&](Array& out, std::size_t from, std::size_t to) {
        for (int k = 0; k < n; ++k) pointers[k] = inputs[k].data + from * size;
        args.out = out.data + from * size;
        args.count = to - from;
        variant.reduce(args);
      };
      part(whole, 0, count);
      for (std::size_t from = 0; from < count;) {
        const std::size_t to = std::min(count, from + 1 + below(700));
        part(pieces, from, to);
        from = to;
      }
      check::that(std::equal(whole.data, whole.data + count * size, pieces.data), variant.name, " ",
                  name_of(op), " ", name_of(dtype), " n=", n, ": pieces differ from the whole");
    }
  }
}

void copies(const ReduceKernels& variant) {
  for (int i = 0; i < 2000; ++i) {
    const std::size_t bytes = below(i % 10 == 0 ? 100000 : 700);
    Array in(bytes, below(64)), out(bytes, below(64));
    fill(in, DType::u8);
    std::fill_n(out.data, bytes, std::byte{0xa5});
    variant.copy_streamed(out.data, in.data, bytes);
    check::that(std::equal(in.data, in.data + bytes, out.data), variant.name, " copy of ", bytes);
    std::fill_n(out.data, bytes, std::byte{0xa5});
    copy(out.data, in.data, bytes, i % 2 == 0 ? Store::streamed : Store::cached);
    check::that(std::equal(in.data, in.data + bytes, out.data), "copy of ", bytes);
  }
}

// Sums of integers small enough to be exact in every float type equal the sum in float64.
void exact_sums() {
  for (DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
    const std::size_t count = 1000 + below(100), size = size_of(dtype);
    const int n = 3 + static_cast<int>(below(6));
    std::vector<Array> inputs;
    std::vector<const void*> pointers;
    std::vector<double> sum(count, 0.0);
    const auto put = [&](std::byte* to, double x) {
      const auto f = static_cast<float>(x);
      const auto h = reference::Float16::of(f);
      const auto b = reference::Bfloat16::of(f);
      const void* from = dtype == DType::f64   ? static_cast<const void*>(&x)
                         : dtype == DType::f32 ? static_cast<const void*>(&f)
                         : dtype == DType::f16 ? static_cast<const void*>(&h)
                                               : static_cast<const void*>(&b);
      std::memcpy(to, from, size);
    };
    for (int k = 0; k < n; ++k) {
      inputs.emplace_back(count * size, 0);
      pointers.push_back(inputs.back().data);
      for (std::size_t i = 0; i < count; ++i) {
        const double x = static_cast<double>(below(31)) - 15;  // |sum| <= 120: exact in bfloat16
        sum[i] += x;
        put(inputs.back().data + i * size, x);
      }
    }
    Array out(count * size, 0), want(count * size, 0);
    for (std::size_t i = 0; i < count; ++i) put(want.data + i * size, sum[i]);
    ReduceArgs args;
    args.inputs = pointers.data();
    args.n = n;
    args.out = out.data;
    args.count = count;
    args.dtype = dtype;
    reduce(args);
    // +0 from cancelled sums, as in float64: bytes can be compared.
    check::that(std::equal(out.data, out.data + count * size, want.data), "exact sum in ",
                name_of(dtype), " n=", n);
  }
}

template <class Change>
void refused(const char* message, Change change) {
  float x = 1, y = 2;
  const void* inputs[] = {&x, &x};
  ReduceArgs args;
  args.inputs = inputs;
  args.n = 2;
  args.out = &y;
  args.count = 1;
  change(args);
  try {
    reduce(args);
    check::that(false, "not refused: ", message);
  } catch (const InvalidArgument& error) {
    check::that(std::string(error.what()).find(message) != std::string::npos, "message '",
                error.what(), "' lacks '", message, "'");
  }
  check::that(y == 2, "a refused call wrote");
}

void refusals() {
  refused("band is not defined on float32", [](ReduceArgs& a) { a.op = ReduceOp::band; });
  refused("avg is not defined on bool", [](ReduceArgs& a) {
    a.op = ReduceOp::avg;
    a.dtype = DType::boolean;
  });
  refused("0 inputs", [](ReduceArgs& a) { a.n = 0; });
  refused("avg by 0", [](ReduceArgs& a) {
    a.op = ReduceOp::avg;
    a.divisor = 0;
  });
  refused("one factor per input", [](ReduceArgs& a) { a.op = ReduceOp::premul_sum; });
}

}  // namespace
